#!/usr/bin/env bash
#SBATCH --job-name=dlion
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1  # one torchrun on each node, which starts the node's ranks
#SBATCH --gpus-per-node=1    # leave it out on nodes without a GPU
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#
# Trains on the nodes that SLURM gives:
#
#   IFNAME=eth0 RANKS_PER_NODE=1 sbatch examples/slurm.sh train.py --its options
#
# IFNAME is the interface that joins the nodes, RANKS_PER_NODE usually the number of GPUs in each.
set -euo pipefail

export GLOO_SOCKET_IFNAME=${IFNAME:-eth0} NCCL_SOCKET_IFNAME=${IFNAME:-eth0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export RANKS_PER_NODE=${RANKS_PER_NODE:-1}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]} MASTER_PORT=${MASTER_PORT:-29500}

# On every node: SLURM_NODEID differs.
srun bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$RANKS_PER_NODE" \
    --node_rank "$SLURM_NODEID" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"' \
    torchrun "$@"
