"""LoRA adapters: read their folders, manage their slots on the device, group the rows of a step by adapter."""
