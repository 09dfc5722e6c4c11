"""How linear layers store and multiply their weights: one file for each format.

``families._tensors.LinearTensors`` describes the checkpoint tensors of a format without torch, for checks and plans.
"""
