"""Models: Hugging Face checkpoints, and Megatron-Core built from them. Imports cpu."""
