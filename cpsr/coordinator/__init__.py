"""Work that is done beside training, within a budget: rehearsals of a recovery."""
