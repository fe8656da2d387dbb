"""What ranks agree on before they move, and which of them vote."""
