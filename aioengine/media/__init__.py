"""[plug-ins] The images of a prompt, by ``model_type``: what stands for them, and how many tokens they take."""
