"""`cpsr bench boost`: whether the predictor's move makes a training end lower when nothing fails."""
