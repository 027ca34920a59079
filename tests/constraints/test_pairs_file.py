"""The pairs file: what people write, and what they hear when it cannot be read."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constraintmatch._internal.errors import InputError
from constraintmatch.constraints.constraint_set import Constraints
from constraintmatch.constraints.graph import label_pairs
from constraintmatch.constraints.pairs_file import files_with, names_in

few = settings(max_examples=25, deadline=None)
NAMES = ["a.png", "b.png", "sub/c.png", "d, e.png", 'f"g.png', "é.png"]
FORMATS = ["csv", "tsv", "jsonl", "parquet"]


def read(folder, text, *, name="pairs.csv", **arguments):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Constraints.read(path, **({"n_images": 10} | arguments))


def refusal(folder, text, **arguments):
    """The error's text with the file's path cut down to its name."""
    with pytest.raises(InputError) as error:
        read(folder, text, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(folder) + "/", "")


def rows(pairs):
    columns = (pairs.left, pairs.right, pairs.link, pairs.weight)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# Round trips


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("names", [None, NAMES])
@few
@given(data=st.data())
def test_what_is_written_reads_back_exactly(tmp_path_factory, suffix, names, data):
    n = data.draw(st.integers(1, 6))
    column = {
        "left": st.integers(0, 2),
        "right": st.integers(3, 5),
        "link": st.floats(0, 1, width=32),
        "weight": st.floats(0, 2.0**100, width=32),
        "annotator": st.text("abc, \"'é", max_size=5),
        "time": st.sampled_from(["2024-05-01T10:00:00", "", "noon"]),
    }
    drawn = {key: data.draw(st.lists(cell, min_size=n, max_size=n)) for key, cell in column.items()}
    pairs = Constraints.from_arrays(n_images=6, **drawn)
    path = tmp_path_factory.mktemp("pairs") / f"pairs.{suffix}"
    pairs.write(path, names=names)
    again = Constraints.read(path, names=names, n_images=6)
    assert rows(again) == rows(pairs)
    assert [who.strip() for who in again.annotator] == [who.strip() for who in pairs.annotator]
    assert again.time == pairs.time
    assert (again.n_images, again.left.dtype, again.link.dtype) == (6, np.int64, np.float32)


@pytest.mark.parametrize("suffix", FORMATS)
def test_plain_pairs_are_written_without_optional_columns(tmp_path, suffix):
    path = tmp_path / f"pairs.{suffix}"
    Constraints.from_lists(n_images=5, must_link=[(0, 4)], cannot_link=[(1, 2)]).write(path)
    again = Constraints.read(path)
    assert rows(again) == [(0, 4, 1, 1), (1, 2, 0, 1)]
    assert (again.n_images, again.annotator, again.time) == (5, None, None)


def test_the_csv_is_what_a_person_would_write(tmp_path):
    path = tmp_path / "new" / "pairs.csv"
    Constraints.from_arrays([0, 1], [1, 3], [1, 0.1], n_images=4, weight=[1, 2.5]).write(path, names=NAMES[:4])
    assert path.read_text() == 'left,right,link,weight\na.png,b.png,1,1\nb.png,"d, e.png",0.1,2.5\n'
    assert [entry.name for entry in path.parent.iterdir()] == ["pairs.csv"]


def test_no_pairs_make_a_file_that_reads_as_no_pairs(tmp_path):
    for suffix in ("csv", "parquet"):
        Constraints.from_lists(n_images=3).write(tmp_path / f"none.{suffix}")
        assert len(Constraints.read(tmp_path / f"none.{suffix}", n_images=3)) == 0


def test_writing_needs_one_name_per_image(tmp_path):
    with pytest.raises(InputError, match="6 names for 3 images"):
        Constraints.from_lists(n_images=3).write(tmp_path / "x.csv", names=NAMES)


# Spellings


@pytest.mark.parametrize(
    ("must", "cannot"),
    [
        ("1", "0"),
        ("1", "-1"),
        ("+1", "-1.0"),
        ("1.0", "0.0"),
        ("must-link", "cannot-link"),
        ("Must_Link", "CANNOT LINK"),
        ("ML", "CL"),
        ("same", "different"),
        (" Yes ", "no"),
        ("TRUE", "False"),
        ("same", "-1"),
    ],
)
def test_links_are_understood_in_every_spelling(tmp_path, must, cannot):
    text = f"left,right,link\n0,1,{must}\n2,3,{cannot}\n4,5,{must}\n"
    assert read(tmp_path, text).link.tolist() == [1, 0, 1]


def test_json_and_parquet_booleans_are_links(tmp_path):
    lines = [json.dumps({"left": 0, "right": 1, "link": True}), json.dumps({"left": "2", "right": 3, "link": False})]
    assert rows(read(tmp_path, "\n".join(lines), name="p.jsonl")) == [(0, 1, 1, 1), (2, 3, 0, 1)]
    table = pa.table({"left": [0.0, 2.0], "right": pa.array([1, 3], pa.uint8()), "link": [True, False]})
    pq.write_table(table, tmp_path / "p.parquet")
    assert rows(Constraints.read(tmp_path / "p.parquet")) == [(0, 1, 1, 1), (2, 3, 0, 1)]


def test_numbers_between_are_soft_links(tmp_path):
    assert read(tmp_path, "left,right,link\n0,1,.25\n2,3,1\n4,5,0\n").link.tolist() == [0.25, 1, 0]


def test_zero_beside_minus_one_cannot_be_told_apart(tmp_path):
    message = refusal(tmp_path, "left,right,link\n0,1,1\n0,2,-1\n0,3,0\n")
    assert message == (
        "pairs.csv lines 3 and 4: links -1 and 0 have no clear meaning together "
        "(0 may mean cannot-link or unknown; write cannot-links as 0 or as -1, not both)"
    )


def test_fractions_beside_minus_one_cannot_be_told_apart(tmp_path):
    message = refusal(tmp_path, "left,right,link\n0,1,0.5\n0,2,-1\n")
    assert message.startswith("pairs.csv lines 2 and 3: links -1 and 0.5 have no clear meaning together")


# Layouts


@pytest.mark.parametrize(
    "text",
    [
        "left,right,link\n0,1,1\n2,3,0\n",
        "\ufeffleft,right,link\r\n0,1,1\r\n2,3,0\r\n",
        "left;right;link\n0;1;1\n2;3;0\n",
        "left\tright\tlink\n0\t1\t1\n2\t3\t0",
        "\n LEFT , Right,link \n\n 0, 1 ,1 \n,,\n2,3,0   \n\n",
        "link,note,right,left\n1,hello,1,0\n0,,3,2\n",
        'left,right,link\n"0" , "1","1"\n2,3,0\n',
        "left,right,link\r0,1,1\r2,3,0\r",
        "left,right,link,weight\n0,1,1\n2,3,0,1,,\n",
        "left,right,link\n0.0,1.0,1\n2.0,3.0,0\n",
    ],
)
def test_layouts_people_make_are_read(tmp_path, text):
    assert rows(read(tmp_path, text)) == [(0, 1, 1, 1), (2, 3, 0, 1)]


def test_excels_unicode_text_is_read(tmp_path):
    assert rows(read(tmp_path, "left\tright\tlink\n0\t1\t1\n".encode("utf-16"), name="p.txt")) == [(0, 1, 1, 1)]


def test_other_column_names_are_given_by_columns(tmp_path):
    text = "i,j,c_ij,sure,weight\n0,1,-1,2,7\n"
    assert rows(read(tmp_path, text, columns="i,j,c_ij")) == [(0, 1, 0, 7)]
    assert rows(read(tmp_path, text, columns="i, j, C_IJ, sure")) == [(0, 1, 0, 2)]


@pytest.mark.parametrize("columns", ["i,j", "i,j,i", "i,,k", "", "a,b,c,d,e,f,g"])
def test_columns_that_do_not_name_three_are_refused(tmp_path, columns):
    assert "for example --columns i,j,c_ij" in refusal(tmp_path, "i,j,c_ij\n0,1,1\n", columns=columns)


def test_unknown_columns_are_named_with_the_mend(tmp_path):
    message = refusal(tmp_path, "i,j,c_ij\n0,1,1\n")
    assert message == (
        "pairs.csv: no column named 'left'; the columns found are i, j, c_ij; "
        "say which are left, right, link, for example --columns i,j,c_ij"
    )
    assert "no column named 'k'" in refusal(tmp_path, "i,j,c_ij\n0,1,1\n", columns="i,j,k")
    few = refusal(tmp_path, "left,right\n0,1\n")
    assert (
        few == "pairs.csv: no column named 'link'; the columns found are left, right; the file needs left, right, link"
    )
    assert "2 columns are named 'left'" in refusal(tmp_path, "left,left,right,link\n0,0,1,1\n")


@pytest.mark.parametrize("first", ["0,1,1", "a.png,b.png,must-link", "3;4;-1"])
def test_a_file_without_a_header_is_told_so(tmp_path, first):
    assert "looks like data" in refusal(tmp_path, f"{first}\n{first}\n")


# Names and row numbers


def test_names_are_found_as_people_write_them(tmp_path):
    text = 'left,right,link\n a.png ,./b.png,1\nsub\\c.png,"d, e.png",0\n"f""g.png",e\u0301.png,1\n'
    assert [row[:2] for row in rows(read(tmp_path, text, names=NAMES, n_images=None))] == [(0, 1), (2, 3), (4, 5)]


def test_whole_numbers_that_are_no_names_are_row_numbers(tmp_path):
    assert rows(read(tmp_path, "left,right,link\na.png,3,1\n", names=NAMES)) == [(0, 3, 1, 1)]


def test_numeric_names_come_before_row_numbers(tmp_path):
    text = "left,right,link\n2,1,1\n"
    assert rows(read(tmp_path, text, names=["1", "2", "3"])) == [(1, 0, 1, 1)]
    assert rows(read(tmp_path, text, names=["0", "1", "2"])) == [(2, 1, 1, 1)]


def test_whole_numbers_of_two_meanings_are_refused(tmp_path):
    message = refusal(tmp_path, "left,right,link\n2,1,1\n1,0,1\n", names=["1", "2", "3"])
    assert message.startswith("pairs.csv line 3: 0 is no image's name but could be a row number, while 1 is")


def test_a_name_that_two_images_bear_is_refused(tmp_path):
    names = ["a", "a", "b"]
    assert "several images are named 'a'" in refusal(tmp_path, "left,right,link\nb,a,1\n", names=names)
    assert rows(read(tmp_path, "left,right,link\n0,1,1\n", names=names)) == [(0, 1, 1, 1)]


def test_names_in_lists_what_a_file_mentions(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("left,right,link\nb.png,a.png,1\na.png,7,0\n")
    assert names_in(path) == ("7", "a.png", "b.png")
    assert rows(Constraints.read(path, names=names_in(path))) == [(2, 1, 1, 1), (1, 0, 0, 1)]
    path.write_text("i,j,k\n1,2,1\n")
    assert names_in(path, columns="i,j,k") is None


# Refusals: the line and the mend


def test_the_message_of_the_design(tmp_path):
    text = "left,right,link\n" + "0,1,1\n" * 12 + "60213,1,1\n"
    message = "pairs.csv line 14: image 60213 does not exist (the set has 50,000 images)"
    assert refusal(tmp_path, text, n_images=50_000) == message
    assert refusal(tmp_path, text, names=[f"{i}.png" for i in range(50_000)]) == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("0,1,1\n\n9,10,1", "line 4: image 10 does not exist (the set has 10 images, counted from 0)"),
        ("0,1,1\n-3,1,1", "line 3: '-3' is not a row number"),
        ("a.png,1,1", "line 2: 'a.png' is not a row number; for names, give the images too"),
        ("0,,1", "line 2: an image is missing"),
        ("0,1,maybe", "line 2: link 'maybe' is not understood; write 1/0, 1/-1, must-link"),
        ("0,1,2", "line 2: link '2' is outside [0, 1]"),
        ("0,1,nan", "line 2: link 'nan' is outside"),
        ("0,1, ", "line 2: the link is missing"),
        ("0,1", "line 2: 2 columns where the header has 3"),
        ("d, e.png,1,1", "line 2: 4 columns where the header has 3; quote names"),
        ("3,3,1\n4,4,0", "line 3: an image cannot be different from itself"),
        ('0,1,1\n"2,3,1\n4,5,1\n6,7,1', "line 3: a quote"),
        ('0,1,1\n"2" ,3,1\n4,5,"1\n6,7,1', "line 4: a quote"),
        ('0,1,"' + "x" * 140_000, "line 2: a quote"),
        ("0,99999999999999999999,1", "line 2: '99999999999999999999' is not a row number"),
    ],
)
def test_csv_mistakes_are_told_with_their_line(tmp_path, body, message):
    assert refusal(tmp_path, f"left,right,link\n{body}\n").startswith(f"pairs.csv {message}")


@pytest.mark.parametrize("weight", ["-1", "nan", "inf", "1e39", "heavy"])
def test_weights_that_are_no_numbers_from_zero_up_are_refused(tmp_path, weight):
    message = refusal(tmp_path, f"left,right,link,weight\n0,1,1,\n0,2,1,{weight}\n")
    assert message.startswith(f"pairs.csv line 3: weight '{weight}'")


def test_an_empty_weight_is_one(tmp_path):
    assert read(tmp_path, "left,right,link,weight\n0,1,1,\n0,2,1,0\n").weight.tolist() == [1, 0]


def test_a_row_number_no_set_could_have_is_refused_without_a_set(tmp_path):
    message = refusal(tmp_path, "left,right,link\n0,1,1\n0,123456789012,1\n", n_images=None)
    assert message == "pairs.csv line 3: image 123456789012 does not exist (the set has 1,000,000,000 images)"


@pytest.mark.parametrize(
    ("written", "meant"), [("c.png", "sub/c.png"), ("b.jpg", "b.png"), ("sub/cc.png", "sub/c.png"), ("zebra", None)]
)
def test_unknown_names_come_with_a_near_match(tmp_path, written, meant):
    message = refusal(tmp_path, f"left,right,link\na.png,{written},1\n", names=NAMES)
    mend = f"; did you mean {meant!r}?" if meant else ""
    assert message == f"pairs.csv line 2: no image is named {written!r} (the set has 6 images){mend}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[0, 1, 1]", "line 3: not an object"),
        ('{"left": 0,', "line 3: not valid JSON"),
        (f'{{"left": {"7" * 5_000}}}', "line 3: not valid JSON (a number has too many digits)"),
        ('{"left": ' + "[" * 100_000, "line 3: not valid JSON (too many brackets within brackets)"),
        ('{"left": 0, "right": 1}', "line 3: the link is missing"),
        ('{"left": 0, "right": true, "link": 1}', "line 3: 'True' is not a row number"),
        ('{"left": 0, "right": 11, "link": 1}', "line 3: image 11 does not exist"),
    ],
)
def test_json_mistakes_are_told_with_their_line(tmp_path, line, message):
    text = '{"left": 0, "right": 1, "link": 1}\n\n' + line
    assert refusal(tmp_path, text, name="p.jsonl").startswith(f"p.jsonl {message}")


def test_json_lines_may_leave_optional_keys_out(tmp_path):
    text = '{"left":0,"right":1,"link":1}\n{"weight":2,"left":1,"right":2,"link":0,"annotator":"bo"}\n'
    pairs = read(tmp_path, text, name="p.ndjson")
    assert (rows(pairs), pairs.annotator) == ([(0, 1, 1, 1), (1, 2, 0, 2)], ("", "bo"))


def test_parquet_mistakes_are_told_with_their_row(tmp_path):
    pq.write_table(pa.table({"left": [0, 1], "right": [1, None], "link": [1, 0]}), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p\.parquet row 2: an image is missing"):
        Constraints.read(tmp_path / "p.parquet")
    assert "not a readable Parquet file" in refusal(tmp_path, "left,right,link\n", name="q.parquet")


def test_names_in_parquet_may_be_bytes_of_text(tmp_path):
    columns = {"left": [b"a.png"], "right": ["é.png".encode()], "link": [b"same"]}
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    assert rows(Constraints.read(tmp_path / "p.parquet", names=NAMES)) == [(0, 5, 1, 1)]
    pq.write_table(pa.table(columns | {"right": ["é.png".encode("latin-1")]}), tmp_path / "q.parquet")
    with pytest.raises(InputError, match=r"q\.parquet: b'\\xe9\.png' is not UTF-8 text; write the file again"):
        Constraints.read(tmp_path / "q.parquet", names=NAMES)


def test_times_in_parquet_are_kept_as_text(tmp_path):
    time = pa.array([np.datetime64("2024-05-01T10:00:00", "s")])
    pq.write_table(pa.table({"left": ["a.png"], "right": ["b.png"], "link": [1], "time": time}), tmp_path / "p.parquet")
    assert Constraints.read(tmp_path / "p.parquet", names=NAMES).time == ("2024-05-01T10:00:00",)


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.jsonl", "pairs.parquet"])
def test_empty_missing_and_folder_are_one_clear_line(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(InputError, match=f"{name}: no such file"):
        Constraints.read(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="the file is empty"):
        Constraints.read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="is a folder"):
        Constraints.read(path)


def test_blank_unknown_and_badly_encoded_files_are_refused(tmp_path):
    assert "the file is empty" in refusal(tmp_path, "\n \n")
    assert "the file is empty" in refusal(tmp_path, "\n \n", name="p.jsonl")
    assert "must end in .csv" in refusal(tmp_path, "x", name="pairs.xlsx")
    assert refusal(tmp_path, b"left,right,link\n0,1,1\n\xe9.png,1,1\n").startswith("pairs.csv line 3: not UTF-8")


def test_self_must_links_in_a_file_are_ignored_and_counted(tmp_path):
    pairs = read(tmp_path, "left,right,link,annotator\n0,0,1,a\n1,2,0,b\n3,3,0.9,c\n")
    assert (rows(pairs), pairs.annotator, pairs.ignored_self_links) == ([(1, 2, 0, 1)], ("b",), 2)


def test_a_name_whose_file_could_not_be_read_gives_the_reason(tmp_path):
    text = "left,right,link\na.png,broken.png,1\n"
    message = refusal(tmp_path, text, names=NAMES, unread={"broken.png": "the file is empty"})
    assert message.startswith("pairs.csv line 2: image 'broken.png' could not be read (the file is empty); ")


def test_an_error_in_a_file_has_its_place_its_problem_and_its_fix_apart(tmp_path):
    with pytest.raises(InputError) as error:
        read(tmp_path, "left,right,link\n0,1,1\n2,3,maybe\n")
    found = error.value
    assert (found.place, found.problem) == (f"{tmp_path / 'pairs.csv'} line 3", "link 'maybe' is not understood")
    assert found.fix.startswith("write 1/0, ")


# Triplets, labels, sizes


@pytest.mark.parametrize("names", [None, NAMES])
@pytest.mark.parametrize("suffix", FORMATS)
def test_triplets_and_sizes_are_written_beside_the_pairs_and_read_back(tmp_path, suffix, names):
    triplets = read(tmp_path, "anchor,near,far,weight\n0,1,2,1\n3,4,5,0.5\n", n_images=6).triplets
    sizes = np.array([[0.1, np.inf]], np.float32)
    given = replace(Constraints.from_lists(n_images=6, must_link=[(0, 1)]), triplets=triplets, sizes=sizes)
    path = tmp_path / f"pairs.{suffix}"
    given.write(path, names=names)
    assert [place.name for place in files_with(path)] == [f"pairs{end}.{suffix}" for end in ("", "-triplets", "-sizes")]
    again = Constraints.join([Constraints.read(place, names=names, n_images=6) for place in files_with(path)])
    assert rows(again) == rows(given)
    assert again.triplets.rows.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert again.triplets.weight.tolist() == [1, 0.5]
    assert again.sizes[0, 0] == sizes[0, 0]
    assert again.sizes[0, 1] > 1e30


def test_labels_become_all_the_pairs_that_they_imply(tmp_path):
    pairs = read(tmp_path, "image,label\n0,cat\n3,dog\n5,cat\n7, dog \n8,\n")
    links = {frozenset(pair): link for *pair, link, _ in rows(pairs)}
    together = [{0, 5}, {3, 7}]
    assert links == {frozenset({i, j}): float({i, j} in together) for i, j in combinations((0, 3, 5, 7), 2)}


def test_many_labels_become_some_pairs_that_join_and_separate_the_same_groups():
    kinds = np.random.default_rng(0).integers(0, 30, 3000)
    left, right, link = label_pairs(kinds)
    assert len(left) < 3000 * 250
    assert (link == (kinds[left] == kinds[right])).all()
    pairs = Constraints.from_arrays(left, right, link, n_images=3000)
    assert len(np.unique(pairs.components())) == 30
    assert len(pairs.component_constraints()[1]) == 30 * 29 / 2


def test_files_of_several_kinds_are_one_and_a_contradiction_between_them_names_both_files(tmp_path):
    parts = [
        read(tmp_path, "left,right,link\n0,1,1\n1,2,0.7\n"),
        read(tmp_path, "image,label\n0,cat\n1,dog\n", name="labels.csv"),
        read(tmp_path, "anchor,near,far\n0,1,2\n", name="triplets.csv"),
        read(tmp_path, "least,most\n0.1,\n", name="sizes.csv"),
    ]
    whole = Constraints.join(parts)
    assert (len(whole), len(whole.triplets), whole.sizes.tolist()) == (3, 1, [[np.float32(0.1), np.inf]])
    with pytest.raises(InputError) as error:
        whole.resolve("error")
    for place in ("labels.csv line 2", "pairs.csv line 2"):
        assert place in str(error.value)
    with pytest.raises(InputError, match="two files say how large clusters are"):
        Constraints.join([parts[3], parts[3]])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("anchor,near,far\n0,1,2\n3,3,4\n", "line 3: anchor and near are the same image; name three images"),
        ("anchor,near,far\n0,1,1\n", "line 2: near and far are the same image"),
        ("anchor,near,far\n0,1,12\n", "line 2: image 12 does not exist (the set has 10 images)"),
        ("anchor,near,far,weight\n0,1,2,-1\n", "line 2: weight '-1' is not a number from 0 up"),
        ("image,label\n0,cat\n1,dog\n0,dog\n", "lines 2, 4: one image has the labels 'cat' and 'dog'"),
        ("least,most\n0.2,0.1\n", "line 2: least 0.2 is above most 0.1; swap them"),
        ("least,most\n500,20\n", "line 2: least 500 is above most 20"),
        ("least,most\nmany,\n", "line 2: size 'many' is not a number from 0 up; write a share such as 0.05"),
        ("least,most\n0.6,\n0.5,\n", "lines 2, 3: the least shares add up to 1.1, more than all images; change least"),
        ("least,most\n,0.4\n,0.5\n", "lines 2, 3: the most shares add up to 0.9, less than all images; change most"),
        ("least,most\n", "there are no sizes in it; add a line such as 0.05,0.2"),
    ],
)
def test_a_wrong_line_of_another_kind_of_file_is_named(tmp_path, text, said):
    assert said in refusal(tmp_path, text)


def test_triplets_in_a_circle_are_an_error_or_left_out(tmp_path):
    text = "anchor,near,far\n0,1,2\n5,6,7\n2,0,1\n1,2,0\n5,7,8\n5,8,6\n0,1,9\n"
    given = read(tmp_path, text)
    assert given.triplets.cyclic(10).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="lines 2, 3, 4, 5, 6, 7: triplets in a circle"):
        given.resolve("error")
    assert given.resolve("drop").triplets.rows.tolist() == [[0, 1, 9]]
    assert len(given.resolve("keep").triplets) == 7
