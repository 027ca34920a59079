"""One training: views, losses, batches, the step, the loop and the run folder. It knows no method."""
