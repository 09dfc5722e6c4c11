"""Drafts: tokens that are proposed for a row, and accepted or rejected in the same step."""
