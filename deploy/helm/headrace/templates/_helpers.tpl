{{- define "headrace.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The settings file: the chart's part wins, since probes and mounts rely on it. */}}
{{- define "headrace.settings" -}}
{{- $own := dict
  "listen" "0.0.0.0:8080"
  "admin_listen" "0.0.0.0:8081"
  "state_dir" "/var/lib/headrace"
  "log_format" "json"
  "workers" (int .Values.workers)
  "engines" .Values.engines -}}
{{- if .Values.keys.existingSecret -}}
{{- $_ := set $own "keys_file" "/etc/headrace-keys/keys.yaml" -}}
{{- else -}}
{{- $_ := set $own "allow_no_keys" true -}}
{{- end -}}
{{- if .Values.policy -}}
{{- $_ := set $own "policy_file" "policy.yaml" -}}
{{- end -}}
{{- $timeouts := merge (dict "drain_s" (int .Values.drainSeconds)) (.Values.settings.timeouts | default dict) -}}
{{- $_ := set $own "timeouts" $timeouts -}}
{{- toYaml (merge $own .Values.settings) -}}
{{- end }}
