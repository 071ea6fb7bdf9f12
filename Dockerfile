# lrl as a user without rights, with the pinned set of requirements/cuda.txt for NVIDIA GPUs, or of requirements/cpu.txt.
#
#     docker build --tag lrl .
#     docker run --gpus all --shm-size 16g --volume "$PWD:/work" lrl fit --config gsm8k
#
#     docker build --build-arg SET=cpu --tag lrl-cpu .
#     docker run --shm-size 1g lrl-cpu fit --config quickstart
#
# Not built by docker yet; the steps of the CPU set have been run one by one, on Python 3.11.
FROM python:3.12-slim
ARG SET=cuda

# A compiler for the kernels that torch and vLLM compile when they start; bubblewrap for lrl.rewards.Code.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential libnuma1 bubblewrap \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /lrl
COPY requirements requirements
# On the CPU torch first, with its dependencies: see the Makefile.
RUN if [ "$SET" = cpu ]; then pip install --no-cache-dir --constraint requirements/cpu.txt torch; fi \
 && pip install --no-cache-dir --no-deps --requirement "requirements/$SET.txt"

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
