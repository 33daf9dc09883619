"""One life of a run: how it opens and closes, the script of a step, and the way back."""
