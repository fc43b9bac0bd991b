"""The protocol between coordinator and agents: topics, messages, tensors, blobs, and the transports that carry them."""
