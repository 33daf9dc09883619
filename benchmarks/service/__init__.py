"""How fast the service answers over a long run's journal, and what memory it takes."""
