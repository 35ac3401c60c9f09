"""Benchmarks of the project itself, run from the repository: `python -m benchmarks.NAME`.

    engine     host cost of a step, on the fake backend
    events     cost of the server's subscription to the engine's events
    http       cost of HTTP: streaming clients next to the same work offline
    flood      a stream while other clients post prompts that are too long
    kernels    products of each type on the CPU, next to the processor's peak
    memory     what `tokenmill fit` plans next to what is used
    agreement  how far logits depend on the way they are computed; perplexity
    llamacpp   engine overhead over llama.cpp; the cost of parked KV
    gpu        the engine on a CUDA device, next to what the device can do
    gpu_serving  this server and vLLM on a CUDA device, over HTTP
    streams    server CPU per streamed token
    turns      host cost of a session's turn by its number

The wheel has those for users (`tokenmill bench`): report, serve, throughput, sessions, compare.
"""
