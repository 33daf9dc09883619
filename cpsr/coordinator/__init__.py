"""Work that is done beside training: in the waits of its thread, or within a budget; rehearsals of a recovery."""
