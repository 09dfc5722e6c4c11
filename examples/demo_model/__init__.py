"""The parts of `examples/train_demo_model.py`: what the demo model is taught, and how."""
