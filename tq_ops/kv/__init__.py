"""The KV cache: storage of any plan by block, where tokens go, and which stay in BF16."""
