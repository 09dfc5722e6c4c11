"""XLM-RoBERTa: as RoBERTa, with another vocabulary."""

from aioengine.families.roberta import read

PLUGIN = read
