# kmp with TensorFlow's CUDA libraries. The machine needs NVIDIA's driver and its container toolkit.
#
#   docker build -t kmp .
#   docker run --rm --gpus all kmp              # kmp doctor
#   docker run --rm --gpus all kmp demo
#   docker run --rm --gpus all -v "$PWD:/home/kmp/work" -w /home/kmp/work --entrypoint python kmp train.py
FROM python:3.12-slim

# NVIDIA's images set these; this one has only Python.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kmp kmp
COPY kmp_bench kmp_bench
COPY kmp_cli kmp_cli
RUN pip install --no-cache-dir ".[cuda,demo]"

RUN useradd --create-home kmp
USER kmp
WORKDIR /home/kmp
ENTRYPOINT ["kmp"]
CMD ["doctor"]
