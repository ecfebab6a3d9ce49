{{/* Labels of an object, and those that select its pods. Called with the chart's root and a part's name. */}}
{{- define "kvshelf.selector" -}}
app.kubernetes.io/name: {{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "kvshelf.labels" -}}
{{ include "kvshelf.selector" . }}
app.kubernetes.io/part-of: kvshelf
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* Not the release's name alone: Kubernetes gives pods variables for each Service, and KVSHELF_PORT is a setting. */}}
{{- define "kvshelf.name" -}}
{{ printf "%s-%s" .root.Release.Name .part | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "kvshelf.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Values.device }}
{{- end }}

{{/* What every pod of the service's own images has. */}}
{{- define "kvshelf.pod" -}}
automountServiceAccountToken: {{ ne .Values.serviceAccountName "" }}
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001 # the group that may read the keys
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvshelf.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{/* What models are kept in, the shared memory in which Ray carries documents, and key files. */}}
{{- define "kvshelf.mounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: home, mountPath: /var/lib/kvshelf}
- {name: tmp, mountPath: /tmp}
- {name: keys, mountPath: /etc/kvshelf, readOnly: true}
{{- end }}

{{- define "kvshelf.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: 512Mi}
- name: home
{{- if .Values.modelsClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.modelsClaim }}}
{{- else }}
  emptyDir: {}
{{- end }}
- name: tmp
  emptyDir: {}
{{ include "kvshelf.keys" . }}
{{- end }}

{{/* Key files: those of the API for what answers callers, and the one that caches are encrypted with for what reads them. */}}
{{- define "kvshelf.keys" -}}
- name: keys
  secret:
    secretName: {{ .Values.secretName }}
    items:
      - {key: keys.json, path: keys.json}
      {{- with .Values.encryptionKey }}
      - {key: {{ . }}, path: encryption-keys}
      {{- end }}
    defaultMode: 0440
{{- end }}

{{- define "kvshelf.store" -}}
- name: KVSHELF_STORE
  valueFrom: {secretKeyRef: {name: {{ .Values.secretName }}, key: store-url}}
{{- if .Values.encryptionKey }}
- {name: KVSHELF_ENCRYPTION_KEY_FILE, value: /etc/kvshelf/encryption-keys}
{{- end }}
{{- end }}

{{/* The GPUs that the replicas of one front end take together. */}}
{{- define "kvshelf.gpus" -}}
{{ mul (len .Values.models) .Values.frontEnds.replicas .Values.frontEnds.gpusPerReplica }}
{{- end }}

{{/* The most front ends that run at one time: those that the autoscaler may ask for, and those that an update adds. */}}
{{- define "kvshelf.most" -}}
{{- $count := ternary .Values.frontEnds.autoscaling.max .Values.frontEnds.count .Values.frontEnds.autoscaling.enabled -}}
{{ add $count .Values.frontEnds.maxSurge }}
{{- end }}

{{/* Requests and limits, with the same number of GPUs in both. */}}
{{- define "kvshelf.resources" -}}
{{- $gpus := dict }}
{{- if .gpus }}{{ $_ := set $gpus "nvidia.com/gpu" (toString .gpus) }}{{ end }}
requests: {{ merge (dict) .resources.requests $gpus | toYaml | nindent 2 }}
limits: {{ merge (dict) .resources.limits $gpus | toYaml | nindent 2 }}
{{- end }}
