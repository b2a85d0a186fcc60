"""torch.export programs: reading their graphs into the vocabulary, and writing fused operators into them."""
