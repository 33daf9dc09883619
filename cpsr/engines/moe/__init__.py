"""Mixtures of experts in an engine: where the experts are, and the tokens that gates route to them."""
