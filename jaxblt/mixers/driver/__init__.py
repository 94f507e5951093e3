"""The contract of mixers, and how whole, streamed and split rows reach them."""
