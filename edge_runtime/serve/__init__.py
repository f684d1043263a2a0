"""An OpenAI-compatible server over one engine, and a page for people.

Invariant: one generation at a time, in a thread of its own; requests wait in a bounded queue. The
event loop never computes, so `/health` answers while the model works.
"""
