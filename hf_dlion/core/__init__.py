"""Lion on messages: codec, layout, update, local steps, averaged gradients and momenta."""
