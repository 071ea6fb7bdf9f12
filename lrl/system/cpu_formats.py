"""Whether the CPU computes in a number format of 16 bits, or converts each number to and from
float32."""

import torch


def computes_in(dtype: str) -> bool:
    """Whether this machine's CPU has fast products of matrices in a number format.

    On an AMD EPYC without AVX-512 one core had 1.4 to 2.1 GFLOP/s in bfloat16 and 61 in float32
    (torch 2.13). There vLLM's engine wrote 650 instead of 2,200 tokens a second of a policy of 5
    million parameters.

    Args:
        dtype: Its name in torch.
    """
    if not torch.backends.mkldnn.is_available():
        return True  # another library computes, of which nothing is known
    questions = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
    # torch's own question before it takes oneDNN; there is no public one.
    return dtype not in questions or bool(getattr(torch.ops.mkldnn, questions[dtype])())
