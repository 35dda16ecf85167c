"""What the manager on torch_checkpointing is made of; torch_checkpointing.py puts it together."""
