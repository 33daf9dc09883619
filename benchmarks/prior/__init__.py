"""Where the predictor's prior comes from: recoveries with many settings on many runs, and the table fitted to them."""
