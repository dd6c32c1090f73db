ARG BASE_IMAGE=pytorch/pytorch:2.5.1-cuda12.1-cudnn9-runtime
ARG MODEL_SIZE=base_plus
FROM ${BASE_IMAGE}
ENV GUNICORN_PORT=5000 APP_ROOT=/opt/sam2
ENV SAM2_BUILD_CUDA=0
ENV MODEL_SIZE=${MODEL_SIZE}
RUN apt-get update && apt-get install -y --no-install-recommends ffmpeg libavcodec-dev pkg-config build-essential
COPY setup.py .
COPY README.md .
RUN pip install --upgrade pip setuptools
RUN pip install -e ".[interactive-demo]"
RUN rm /opt/conda/bin/ffmpeg && ln -s /bin/ffmpeg /opt/conda/bin/ffmpeg
COPY demo/backend/server ${APP_ROOT}/server
COPY sam2 ${APP_ROOT}/server/sam2
ADD https://weights.example.org/sam2.1_hiera_tiny.pt ${APP_ROOT}/checkpoints/sam2.1_hiera_tiny.pt
WORKDIR ${APP_ROOT}/server
CMD gunicorn app:app --bind 0.0.0.0:${GUNICORN_PORT}
