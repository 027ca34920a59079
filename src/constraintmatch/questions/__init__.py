"""Questions and answers: what answers say, what to ask next, rounds of asking, a simulated annotator."""
