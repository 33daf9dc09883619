"""Another number of ranks than the run had: which are allowed, and what of the state each new rank takes."""
