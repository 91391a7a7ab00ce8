"""All-reduce that user code calls: peers that make the same call meet and average their tensors."""
