"""Memory and speed of prediction at the size of a real model, over a history on disk."""
