"""All that travels between ranks: collectives, headers, votes, and comparisons."""
