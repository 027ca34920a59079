-- The tables of a database of answers, version 2.

CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE questions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    image TEXT NOT NULL,            -- by name: row numbers change when a folder grows
    shown TEXT NOT NULL,            -- JSON list of names
    look BLOB NOT NULL,             -- a tiny thumbnail of each image, the asked one first
    key TEXT NOT NULL,              -- the same for the same question in another order
    model TEXT NOT NULL,            -- who chose it
    added TEXT NOT NULL,
    urgent INTEGER NOT NULL,        -- 1: asked first, and even if the answers imply it
    state TEXT NOT NULL CHECK (state IN ('waiting', 'answered', 'retired')),
    holder TEXT,                    -- the annotator who has it on the screen
    held_until REAL,
    nearer INTEGER NOT NULL DEFAULT 0  -- 1: a triplet, which asks to which of two images it is nearer
);

CREATE INDEX questions_by_key ON questions (key);

CREATE INDEX questions_by_state ON questions (state, urgent, id);

CREATE TABLE answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    question INTEGER NOT NULL REFERENCES questions (id),
    choice INTEGER NOT NULL,        -- place in shown (a triplet: the nearer one), -1 none (a pair: different), -2 unsure
    annotator TEXT NOT NULL,
    milliseconds INTEGER,
    time TEXT NOT NULL,             -- ISO 8601, UTC
    weight REAL NOT NULL DEFAULT 1,
    origin TEXT NOT NULL DEFAULT '',    -- the file it was imported from
    replaces INTEGER REFERENCES answers (id),
    withdrawn TEXT NOT NULL DEFAULT '', -- why it no longer stands: undo, withdrawn, changed
    withdrawn_by TEXT,
    withdrawn_at TEXT);

CREATE INDEX answers_by_question ON answers (question);

CREATE TABLE clusters (cluster INTEGER PRIMARY KEY, name TEXT NOT NULL);

CREATE VIEW answered AS
    SELECT answers.id, image, shown, choice, annotator, milliseconds, time, model, weight, origin, withdrawn
    FROM answers JOIN questions ON questions.id = answers.question;
