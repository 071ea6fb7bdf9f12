# lrl for nodes with NVIDIA GPUs: the pinned set of requirements/cuda.txt, as a user without rights. Not built yet.
#
#     docker build --tag lrl .
#     docker run --gpus all --shm-size 16g --volume "$PWD:/work" lrl fit --config gsm8k
FROM python:3.12-slim

# A compiler for the kernels that torch and vLLM compile when they start; bubblewrap for lrl.rewards.Code.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential libnuma1 bubblewrap \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /lrl
COPY requirements/cuda.txt requirements/
RUN pip install --no-cache-dir --no-deps --requirement requirements/cuda.txt

COPY pyproject.toml README.md LICENSE ./
COPY callbacks callbacks
COPY recipes recipes
COPY lrl lrl
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# The driver comes from the machine, through NVIDIA's container toolkit.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home --uid 1000 lrl && install --directory --owner lrl /work
USER lrl
WORKDIR /work
ENTRYPOINT ["lrl"]
CMD ["doctor"]
