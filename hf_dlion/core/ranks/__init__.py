"""What ranks tell one another before anything moves, and which ranks meet where."""
