"""Which flipped bits the repetition of a step finds, on which rank it places them, and what it costs."""
