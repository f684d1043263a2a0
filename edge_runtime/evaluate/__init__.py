"""How good a converted model is: what `bitnest-edge eval` measures.

A task (`ppl`, `gsm8k`, `agreement`, `acceptance`, `jsonl`) runs over items of data files, one at a
time, and makes a record of each: plain sums and counts. Everything that is reported is computed
from records alone (`stats`), so a run that was stopped and resumed reports what an uninterrupted
one does. What it does not do: execute code that a model wrote.
"""
