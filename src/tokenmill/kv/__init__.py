"""Paged KV memory, and what the backends on top of it share. Imports numpy and the contract.

    tables.py         BlockPool, BlockTables: which blocks are free, which ones a sequence holds
    paged.py          PagedKV: the contract's KV rules on block tables
    paged_backend.py  PagedBackend: forward, sample, collect; StepQueue: the steps in flight; WeightsGate

Start with `docs/contract.md`.
"""
