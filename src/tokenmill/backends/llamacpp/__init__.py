"""GGUF models on llama.cpp, through llama-cpp-python's low-level functions. Imported only where it is asked for."""
