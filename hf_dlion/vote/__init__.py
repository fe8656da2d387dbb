"""What a rank says about its update, how votes are counted, and which tensors travel together."""
