"""LoRA adapters of the demo model that answer in another style."""
