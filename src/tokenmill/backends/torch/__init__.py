"""The torch backend: Hugging Face directories and GGUF files on CPU and CUDA."""
