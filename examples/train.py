"""A small DDP job in plain PyTorch, which the recipes for Slurm, Kubernetes and Docker start.

Here: `cpsr run --nproc-per-node=2 examples/train.py --run-dir runs/example`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True, help="on storage that all ranks share")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=50, help="iterations between checkpoints")
    parser.add_argument("--target", help="fsspec URL of a bucket or disk that gets copies, as s3://bucket/run")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    x = torch.randn(8000, 16)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), drop_last=True)
    layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    module = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    checkpoint = {"interval_iterations": options.interval, "target": options.target}
    config = {"run_dir": options.run_dir, "mode": "exact", "checkpoint": checkpoint}
    with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
        batches = recovery.resume(loader, repeat=True)
        while recovery.iteration < options.iterations:
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            if recovery.iteration % 100 == 0 and dist.get_rank() == 0:
                print(f"iteration {recovery.iteration}: loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
