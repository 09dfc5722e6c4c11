"""LoRA adapters: reading their folders, their slots on the device, and the rows of a step by adapter."""
