"""The name of a device, and the peak speed of GPUs: MFU is the share of it that a run reaches."""

import torch

# Dense bfloat16 peaks of NVIDIA's data sheets, or float16 without bfloat16, FLOPs per second, by
# the name that the driver returns. Figures that a sheet gives with sparsity are halved.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,  # https://resources.nvidia.com/en-us-blackwell-architecture
    "NVIDIA H200": 989e12,  # https://www.nvidia.com/en-us/data-center/h200/
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM; https://www.nvidia.com/en-us/data-center/h100/
    "NVIDIA H100 NVL": 835.5e12,
    # https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,  # https://www.nvidia.com/en-us/data-center/a100/
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,  # https://www.nvidia.com/en-us/data-center/l40s/
    "NVIDIA L40": 181e12,  # https://www.nvidia.com/en-us/data-center/l40/
    "NVIDIA L4": 121e12,  # https://www.nvidia.com/en-us/data-center/l4/
    "NVIDIA A10": 125e12,  # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 4090": 165e12,
    # https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf
    "NVIDIA GeForce RTX 3090": 71e12,
    "Tesla V100-SXM2-16GB": 125e12,  # https://www.nvidia.com/en-us/data-center/v100/
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla T4": 65e12,  # https://www.nvidia.com/en-us/data-center/tesla-t4/
}


def device_name(device: torch.device, threads: int | None = None) -> str:
    """Return the name of a GPU, or the type of another device, for a CPU with a number of threads.

    Args:
        threads: None: those that torch uses now.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"cpu, {threads or torch.get_num_threads()} threads"
    return device.type
