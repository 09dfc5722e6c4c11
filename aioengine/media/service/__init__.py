"""The work of the media process: downloads, decoding and preparation of images."""
