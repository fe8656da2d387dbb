"""What a step does when all ranks have agreed: votes, local steps, and means."""
