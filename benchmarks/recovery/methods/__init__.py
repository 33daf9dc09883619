"""The ways to come back that are compared: research baselines, and the product's own predictors, by name."""
