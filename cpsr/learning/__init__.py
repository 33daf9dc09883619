"""The predictor in a running job: its thread, when it may run, its memory, and how ranks divide the work."""
