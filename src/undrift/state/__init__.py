"""State that outlives a round: client rows and checkpoints."""
