"""What a model is worth: predictions and scores, neighbours, the judge of held-out pairs, the report."""
